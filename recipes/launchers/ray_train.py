"""Ray Train starts the processes and their group; a recipe runs in them as under torchrun.

python ray_train.py 16 pretrain.py out=s3://bucket/runs/a data.path=s3://bucket/tokens
"""

import importlib.util
import sys


def train(given):
    """Run a recipe in a worker of Ray, which has a process group already.

    Args:
        given: ``recipe``, a file that every worker has, and its ``settings``.

    Raises:
        RuntimeError: If the recipe ends with an exit code that is not 0, which Ray counts against
            ``max_failures``.
    """
    path, settings = given["recipe"], given["settings"]
    spec = importlib.util.spec_from_file_location("recipe", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is no Python file")
    recipe = sys.modules["recipe"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    sys.argv = [path, *settings]
    try:
        recipe.main()
    except SystemExit as end:  # of a thread, which Ray would take for a success
        if end.code:
            raise RuntimeError(f"{path} ended with code {end.code}; see status.json") from None


def main():
    """Start as many workers as asked for, one per GPU, and again where one was lost."""
    from ray.train import (  # pyright: ignore[reportMissingImports]
        FailureConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.torch import TorchTrainer  # pyright: ignore[reportMissingImports]

    workers, recipe, *settings = sys.argv[1:]
    trainer = TorchTrainer(
        train,
        train_loop_config={"recipe": recipe, "settings": settings},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
