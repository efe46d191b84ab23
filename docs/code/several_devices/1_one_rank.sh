roomier fit --model project.Classifier --model.dropout 0 --data project.Points --data.batch_size 40 \
    --trainer.max_epochs 3 --seed_everything 0
