import roomier

try:
    roomier.Trainer(strategy="zero4", devices=2)
except roomier.PlanError as error:
    print(error)
    print(error.field, repr(error.received), sep=": ")
