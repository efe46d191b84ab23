import roomier

try:
    roomier.Trainer(strategy="tensor_parallel", devices=2)
except roomier.PlanError as error:
    print(error)
