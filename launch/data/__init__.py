"""The data of a job: checked before it starts, and put into prompts."""
