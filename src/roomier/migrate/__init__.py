"""Settings of other libraries. The answer to a setting is a Trainer argument, a remark, or an error."""
