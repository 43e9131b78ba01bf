"""What a user asks for, and the plan: requests, the step in every number of microbatches, and the loop of every search.

`plan_for` checks a request (`checks`) and asks for a plan of one stage (`one_stage`) or several (`stages`), whichever
is faster (`one_or_several`), of replicas (`replicas`), the best of these (`device_kinds`), or one by a named search
(`method`). One loop writes the plan that is found out, counts its memory, reserves what the search did not see, and
searches again, until it fits (`refine`).
"""
