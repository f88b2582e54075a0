"""One optimizer step: further losses, counts, clipping, and sums over replica groups."""

from forgekit.steps.losses import losses_by_source as losses_by_source
from forgekit.steps.log_probs import linear_log_probs as linear_log_probs
from forgekit.steps.sparse_kl import sparse_kl as sparse_kl
from forgekit.steps.dpo import (
    check_dpo as check_dpo,
    document_log_probs as document_log_probs,
    dpo_loss as dpo_loss,
)
from forgekit.steps.accumulate import count_ahead as count_ahead
from forgekit.steps.totals import Totals as Totals
from forgekit.steps.audit.first_step import audited as audited
from forgekit.steps.audit.agreement import UnreducedError as UnreducedError
from forgekit.steps.replicas import (
    OneGroup as OneGroup,
    Part as Part,
    Replicas as Replicas,
    sum_replicas as sum_replicas,
)
from forgekit.steps.clip import (
    Correction as Correction,
    SpikeLimit as SpikeLimit,
    limit_spikes as limit_spikes,
)
