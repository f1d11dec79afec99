"""Lets a CUDA build of torchvision be imported beside a torch without CUDA.

Package indexes have torchvision as a CUDA build, whose native library a torch for CPUs cannot load. torchvision then
fails at its import, because it registers shapes for operators that the library would have defined; and with it fail
all classes of transformers and vLLM that read images, also where they are used for text. With the operators' names
defined, its Python part works: the transforms, which is all that these classes use. A call of such an operator raises
torchvision's own RuntimeError.

Knows torchvision's operators, and where it writes its version. Knows nothing of vLLM or of models.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OPERATORS = (
    *("nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "ps_roi_align", "_ps_roi_align_backward"),
    *("roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward"),
)
_VERSION = re.compile(r"__version__ = '[^']*\+cu\d+'")
_libraries: list[Any] = []
"""torch forgets the operators with the object that defined them."""


def define() -> None:
    """Entry point (`torch.backends`): torch calls it in every process at the end of its own import. Does nothing beside
    a torch with CUDA, and without a CUDA build of torchvision. A second call changes nothing."""
    import torch

    if torch.version.cuda is not None or _libraries or not _is_for_cuda():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}() -> ()")
    _libraries.append(library)


def _is_for_cuda() -> bool:
    """Whether the torchvision that would be imported is a CUDA build. Does not import it."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).parent / "version.py"
    return version.is_file() and _VERSION.search(version.read_text()) is not None
