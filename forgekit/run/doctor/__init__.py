"""What a machine, a folder and a group of processes can do, before a run needs it."""
