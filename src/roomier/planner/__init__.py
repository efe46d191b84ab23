"""What a run will cost before it runs: bytes and seconds of each plan, and the plan to choose."""
