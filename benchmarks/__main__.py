"""Run every benchmark but those that take long by nature, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

LONG = (
    *("learn", "hostile_load", "plans", "kill", "gpu", "verdicts", "evaluators", "mutations"),
    "push",
)

for script in sorted(Path(__file__).parent.glob("[!_]*.py")):
    if script.stem in LONG:
        continue
    print(script.stem, flush=True)
    subprocess.run([sys.executable, str(script)], check=True)
