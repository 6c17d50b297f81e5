"""Ranks of one worker on several machines, its nodes.

node 0: the worker that everybody knows                 node 1, 2, ...: `python -m coppice_worker --node-rank 1`
rank 0 --- ranks of this machine, over sockets          a process that starts the ranks of its machine
  |                                                       |  and ends with them
  +-- --dist-init-addr <--- one link of each node --------+
                       <--- one link of each rank ----- ranks of that machine
sums: gloo or NCCL, from each rank to each, beside the links

`terms`      what nodes must have in common, and the sentence that says what they do not
`handshake`  who comes to node 0, and what it answers; nothing else is read from strangers
`link`       one connection: commands, copies and the meeting's store side by side, and a beat
`store`      names and values through which gloo and NCCL find each other; only bytes, over links
`listener`   node 0 waits for all
`leader`     rank 0 among ranks on several machines
`node`       the process of another node
`member`     a rank's end of its link
"""
