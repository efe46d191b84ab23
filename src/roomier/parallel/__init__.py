"""One model on several ranks: which of its parts travel together, and how they do."""
