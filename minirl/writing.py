"""Files that are written: an error names the file, as Python's own do only where one is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Let errors of the system name a file.

    Raises:
        OSError: As raised inside, with the file's name; safetensors' own error too.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None
