"""`headway bench stream`: the trajectory plane against its parts, and many generators on one learner.

bench      the command: interleaves, prints, writes rows
plane      the learner's side of the plane, with everything but the training
peers      processes that send: one generator that sends as fast as its tickets allow, a crowd, a plain PUSH
crowd      a thousand generators that think about their tickets
content    what they all say
floors     what the plane is measured against: plain PUSH/PULL, and plain fsynced appends
"""
