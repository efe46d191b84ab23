"""What is kept of the forward for the backward: computing again, offloading, and a budget for both."""
