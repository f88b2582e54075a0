"""On-policy training: answers become batches, their losses, streams and published weights."""

from forgekit.rollouts.batch import (
    group_advantages as group_advantages,
    join_rollouts as join_rollouts,
    rollout_batch as rollout_batch,
)
from forgekit.rollouts.losses import (
    KL as KL,
    ImportanceCorrection as ImportanceCorrection,
    cispo_loss as cispo_loss,
    dapo_loss as dapo_loss,
    dr_grpo_loss as dr_grpo_loss,
    grpo_loss as grpo_loss,
    gspo_loss as gspo_loss,
    ppo_loss as ppo_loss,
)
from forgekit.rollouts.sources import RedisSource as RedisSource
from forgekit.rollouts.stream import RolloutStream as RolloutStream
from forgekit.rollouts.weights import (
    publish_weights as publish_weights,
    read_weights as read_weights,
)
