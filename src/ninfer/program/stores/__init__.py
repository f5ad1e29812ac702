"""Where histories live. ``pages`` counts the device pages of one pool; ``blocks`` and ``spaces`` build paged histories
from them, with shared pages and copied tails; ``rows`` is the block table the device reads; ``images`` keeps recurrent
states; ``host`` is the arithmetic of host memory. Stores hand out and take back; they copy nothing and know no policy.
"""
