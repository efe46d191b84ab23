"""The seconds of a step."""
