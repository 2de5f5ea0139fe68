"""The laws that every component satisfies, as checks for your components: `check_stage(MyStage())` names broken laws.

The functions run the same laws as the package's own tests and need no test runner. They return a short report, or raise
a `LawError` (an `AssertionError`) that names the component, the law, and the wrong value.

`with accelerator("cuda") as counts:` counts host waits, copies, kernels and bytes on a simulated device.
"""

from .accelerator import DeviceCounts as DeviceCounts
from .accelerator import LineCounts as LineCounts
from .accelerator import accelerator as accelerator
from .check import check_averaging as check_averaging
from .check import check_cadence as check_cadence
from .check import check_constraint as check_constraint
from .check import check_eigenvalue_bound as check_eigenvalue_bound
from .check import check_quantizer as check_quantizer
from .check import check_schedule as check_schedule
from .check import check_solver as check_solver
from .check import check_stage as check_stage
from .check import check_statistic as check_statistic
from .check import check_task as check_task
from .check import check_view as check_view
from .check import check_weight_decay as check_weight_decay
from .laws import LawError as LawError
from .laws import LawReport as LawReport
