"""Conversion of Hugging Face checkpoints to GGUF: `convert` and `plan`.

`plan` reads headers only and tells what a conversion would write; `convert` does it.
"""

from imp_runtime.convert.errors import ConvertError
from imp_runtime.convert.options import ConvertOptions, parse_size
from imp_runtime.convert.plan import ConvertPlan, Output, schemes_seen
from imp_runtime.convert.planner import plan
from imp_runtime.convert.progress import Progress
from imp_runtime.convert.run import ConvertReport, convert, output_path

__all__ = [
    "ConvertError",
    "ConvertOptions",
    "ConvertPlan",
    "ConvertReport",
    "Output",
    "Progress",
    "convert",
    "output_path",
    "parse_size",
    "plan",
    "schemes_seen",
]
