"""One run in its directory: its record, bad steps, status, ends of data, hangs and memory."""

from forgekit.run.run_directory import (
    Run as Run,
    every as every,
)
from forgekit.run.bad_steps import (
    BadSteps as BadSteps,
    BadStepError as BadStepError,
    bad_step_policy as bad_step_policy,
    roll_back as roll_back,
)
from forgekit.run.status import (
    RunLockedError as RunLockedError,
    lock_run as lock_run,
    write_status as write_status,
)
from forgekit.run.data_end import DataEnd as DataEnd
from forgekit.run.rendezvous import (
    HangError as HangError,
    barrier as barrier,
)
from forgekit.run.memory import (
    periodic_collection as periodic_collection,
    report_out_of_memory as report_out_of_memory,
)
