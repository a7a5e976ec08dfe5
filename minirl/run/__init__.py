"""What a run needs beside learning: processes, preemption, checkpoints, metrics, files."""
