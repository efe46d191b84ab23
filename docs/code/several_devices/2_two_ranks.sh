roomier fit --model project.Classifier --model.dropout 0 --data project.Points --data.batch_size 20 \
    --trainer.max_epochs 3 --seed_everything 0 --trainer.devices 2 --trainer.strategy zero2
