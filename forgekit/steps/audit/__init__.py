"""What a run's first step proves before anything is updated."""
