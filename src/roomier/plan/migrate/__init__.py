"""Settings of other libraries. Each setting becomes a Trainer argument, a remark, or an error."""
