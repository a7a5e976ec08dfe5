"""SQL as text: tokens, and SQL out of replies."""
