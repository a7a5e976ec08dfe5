"""The data of a job: checked before it starts, prepared once, put into prompts."""
