import roomier
from roomier.plan import plan_from_flags

plan = plan_from_flags(precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=1.0)
print(plan)
assert roomier.Plan.from_yaml(plan.to_yaml()) == plan
