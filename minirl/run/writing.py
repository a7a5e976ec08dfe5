"""Files of tensors that are written: an error names the file."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from minirl.run.files import naming

_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Let errors of the system name a file, also those that safetensors tells in its own words.

    Raises:
        OSError: As `naming`.
    """
    try:
        with naming(path):
            yield
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None
