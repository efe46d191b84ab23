"""Settings of other libraries. Each setting is translated to a Trainer argument, a remark, or an error."""
