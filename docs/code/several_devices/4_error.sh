roomier fit --model broken.Broken --data project.Points --trainer.devices 2 2>&1 | tail -n 5
