"""The launcher's side of a job on several hosts: the programs that reach them, and the check of the hosts before."""
