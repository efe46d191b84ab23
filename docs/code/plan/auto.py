from my_code import Classifier, Points

import roomier

trainer = roomier.Trainer(
    strategy="auto",
    memory_budget="2GiB",  # per device; by default, the memory of the device
    max_steps=5,
    default_root_dir="runs/planned",
)
trainer.fit(Classifier(), datamodule=Points())
print(trainer.choice.why)
assert trainer.plan.parallel.strategy == "single"
