"""What a rank holds in memory: by formula before it runs, and measured while it does."""
