/* Demotions come to rest: leaves of the device that are the next victims are copied to a host that holds fewer of them.

   At every tick the cache copies the next victims that the host has not; for that the host drops its coldest. Where the
   host is too small, what is copied next was dropped by the copy before: without the rule that a leaf is copied once
   for each use, the copies never end. Checked: at most one order for each use of a leaf.

   -DX_ONCE takes the rule away. */

#define LEAVES 3
#define HOST 2                         /* leaves that it holds */
#define USES 3                         /* of leaves by requests, beside the first one of each */

bool C_more_copies_than_uses;          /* never assigned: it names the assertion that fails */
byte used[LEAVES] = { 1, 2, 3 };       /* number of the latest use */
byte copied[LEAVES];                   /* and of that at the latest copy */
byte uses = LEAVES, orders;
chan host = [HOST] of { byte };        /* leaves, the coldest first */

active proctype Requests() {
  byte i;
  do
  :: atomic { uses < LEAVES + USES -> uses++;
       i = 0;
       do :: i < LEAVES-1 -> i++ :: break od;   /* any leaf */
       used[i] = uses; i = 0 }
  :: uses == LEAVES + USES -> break
  od
}
active proctype Cache() {
  byte i, dropped;
end: do
#ifdef X_ONCE
#define MAY_COPY(i) true
#else
#define MAY_COPY(i) (copied[i] != used[i])
#endif
#define DEMOTE(i) :: atomic { !host??[i] && MAY_COPY(i) -> \
       if :: full(host) -> host?dropped; dropped = 0 :: else fi; \
       host!i; copied[i] = used[i]; orders++; assert(orders <= uses || C_more_copies_than_uses) }
  DEMOTE(0) DEMOTE(1) DEMOTE(2)
  od
}
