"""Finding plans. A search takes a program's graph and a cluster and returns a Plan; it knows nothing of execution."""
