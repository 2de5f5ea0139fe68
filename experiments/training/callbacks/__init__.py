"""What happens beside training: callbacks, some of which end runs, and trackers, which tell other programs of them."""

from .base import Callback as Callback
from .base import Limits as Limits
from .base import Patience as Patience
from .base import RunView as RunView
from .base import StopAfter as StopAfter
from .base import no_batch as no_batch
from .calls import Callbacks as Callbacks
from .trackers import JSONL as JSONL
from .trackers import TensorBoard as TensorBoard
from .trackers import Tracker as Tracker
from .trackers import WandB as WandB
