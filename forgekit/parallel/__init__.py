"""One model on many ranks: the types of the options of ``parallelize``."""

from forgekit.parallel.fsdp import Precision as Precision
from forgekit.parallel.activation_checkpoint import ActivationCheckpoint as ActivationCheckpoint
from forgekit.parallel.pipeline.schedule import PipelineSchedule as PipelineSchedule
from forgekit.parallel.context.context_parallel import ContextParallel as ContextParallel
