"""Commands that wire databases, rewards and the learner together."""
