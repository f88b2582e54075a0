"""Pipeline parallelism: split into stages, schedule, runtime."""
