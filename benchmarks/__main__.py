"""Run every benchmark but `learn`, which takes hours, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

for script in sorted(Path(__file__).parent.glob("[!_]*.py")):
    if script.stem == "learn":
        continue
    print(script.stem, flush=True)
    subprocess.run([sys.executable, str(script)], check=True)
