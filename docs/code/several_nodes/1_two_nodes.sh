# The command of each node. This example runs both on one machine.
node() {
    NODE_RANK=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533 \
        roomier fit --model project.Classifier --data project.Points --seed_everything 0 --trainer.max_epochs 3 \
        --trainer.num_nodes 2 --trainer.devices 1 --trainer.strategy zero2
}
node 1 &
node 0
wait
