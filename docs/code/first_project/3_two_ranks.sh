roomier fit --model project.Model --data project.Code --trainer.max_steps 400 --ckpt_path last \
    --trainer.devices 2 --trainer.strategy zero2
