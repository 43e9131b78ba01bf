"""What a user asks for, and the plan: requests, the step in every number of microbatches, and the loop of every search.

`plan_for` checks a request (`checks`) and asks for a plan of one stage (`one_stage`), of several (`stages`), of
replicas (`replicas`), the best of these (`one_or_several`, `device_kinds`), or one by a named search (`method`). Each
searches, writes the plan out, counts its memory and reserves what the search did not see, until it fits (`refine`).
"""
