"""Programs, which only find each other when they are run; not for pytest to import."""

collect_ignore_glob = ["s*.py"]
