"""Replica groups that come and go during a run."""

from forgekit.replicas.groups import join_replicas as join_replicas
