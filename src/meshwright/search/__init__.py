"""Finding plans. A search takes a program's graph and a cluster and returns a Plan; it knows nothing of execution.

Each package here uses those named before it:

* `prices`: seconds of operators, conversions and parameters on one logical mesh;
* `restrictions`: what is fixed before a search begins;
* `intra`: the layouts of one stage, within a limit of memory;
* `inter`: submeshes and their logical meshes; layers on submeshes, as numbers for the dynamic program;
* `stages`: what a range of layers takes and holds on a submesh;
* `pipelines`: the default search, for one stage and for several;
* `space`: all plans as data, for searches that walk through them;
* `rivals`: the search methods of the literature, on that space.
"""
