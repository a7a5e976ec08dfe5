"""The reward families as other trainers call them; none of these modules needs its trainer."""
