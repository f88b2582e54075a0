"""Pipeline parallelism: splitting into stages, schedules, runtime."""
