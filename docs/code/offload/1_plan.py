from roomier.plan import plan_from_flags

plan = plan_from_flags(
    strategy="zero3",
    devices=2,
    optimizer="adamw",
    offload={
        "optimizer_states": "disk",
        "parameters": "disk",
        "folder": "/scratch",  # a local disk of each machine
        "share": 0.6,  # 60 % of the optimizer states; the other states stay on the device
        "update": "deferred",
    },
)
print(plan)
