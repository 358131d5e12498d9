"""`zero plan`: the memory and the time of a run, before it starts; `zero plan --groups`: its ranks as a grid."""
