/* Copies between the device's blocks and the host's, beside steps, through lost connections and crashes.

     cache                                  worker
     source pinned, target LEASED  ORDER    source read, target opened and written by the copy
                                  ------>   (copies run beside steps and take any time)
     target CACHED, pin gone      <------   both let go, target sealed
                                   DONE

   The cache owns the ledger. Requests stand for their scheduler's lease: acquire, one step, publish, detach, release.
   The connection between cache and worker keeps its order; when it ends, all that is on its way is lost, and the cache
   says again what is unanswered. A restarted cache knows nothing: the ledger is closed until the worker acknowledged
   the fence of the window. What cache and schedulers tell each other is one step here.

   Rules at the worker:
     X_WHOLE    CopiesDone is said when the copy is over
     X_MEMORY   a repeated order is answered from memory, not copied again
     X_FORGET   another incarnation of the cache: what is remembered of orders is forgotten, what is under way goes on
     X_FENCE    a fence is acknowledged when the copies before it are over
     X_HELD     a takeover leaves what copies use
   and at the cache:
     X_EPOCH    order ids carry the cache epoch
     X_PIN      the source is pinned until the worker's word
     X_WORD     the target is found after the worker's word
     X_CLOSED   after a restart the ledger opens with the acknowledgement of the window's fence
   -DX_<RULE> takes one away; the assertion that fails then names the invariant. X_EPOCH and X_FORGET cover for each
   other. */

#ifndef ND
#define ND 1              /* blocks of the device: 0 .. ND-1 */
#endif
#ifndef NH
#define NH 1              /* blocks of the host: ND .. N-1 */
#endif
#ifndef NR
#define NR 2              /* requests, at most 3 */
#endif
#ifndef NO
#define NO 2              /* orders of one incarnation of the cache, at most 2 */
#endif
#ifndef CRASHES
#define CRASHES 0         /* of the cache, at most 1 */
#endif
#ifndef CUTS
#define CUTS 0            /* lost connections between cache and worker */
#endif
#ifndef TAKEOVERS
#define TAKEOVERS 0       /* scheduler 0 dies, scheduler 1 takes the worker over */
#endif
#ifndef TEXT1
#define TEXT1 1           /* what request 1 computes; requests 0 and 2 compute text 1 */
#endif
#define TEXTS(r) ((r) == 1 -> TEXT1 : 1)
#define OWNERS(r) ((r) && TAKEOVERS)   /* the scheduler of a request */

#define N (ND+NH)
#define ON_HOST(b) ((b) >= ND)
#define BIT(i) (1 << (i))
#define NK (2*NO)         /* orders of both incarnations: number = (cache epoch - 1) * NO + order id */
#ifdef X_EPOCH
#define ID(number) ((number) % NO)
#define NUMBER(id) ((ce-1)*NO + (id))
#else
#define ID(number) (number)          /* with the cache epoch in it */
#define NUMBER(id) (id)
#endif

/* Never assigned: they name the assertion that fails. */
bool I4_generation_used_before, I7_written_while_used, I8_found_but_not_written, I9_free_while_used,
     I9_granted_while_used, I12_read_something_else, W_users_do_not_follow, W_correct_order_refused;

/* ---- between cache and worker ---- */
mtype = { REGISTERED, ORDER, FENCE, DONE, FAILED, ACK };
chan down = [NO+3] of { mtype, byte };
chan up = [2*NO+2] of { mtype, byte };
bool connected = true;
byte cuts = CUTS;
#define SESSION_FENCE 0
#define WINDOW_FENCE 1

/* ---- cache ---- */
#define FREE 0
#define LEASED 1
#define CACHED 2
#define DRAINING 3
#define OPEN 0            /* grants and orders */
#define DOWN 1
#define STARTED 2         /* waits for the worker */
#define WINDOW 3          /* schedulers claim what they hold */
#define CLOSING 4         /* waits for the acknowledgement of the window's fence */
byte phase = OPEN, ce = 1, crashes = CRASHES;
byte state[N], generation[N], tree[N];   /* tree: which text is found in the block */
byte held[N], draining[N];               /* bit per request: leases, and leases whose session expired */
byte jobs, next_id;                      /* orders without an answer, bit per number; the next order id */
byte pins[N]; bool written_for[N];       /* the leases of these orders on their sources and targets */
byte src[NK], dst[NK], src_gen[NK], dst_gen[NK], text[NK];   /* what the orders say */
byte log_gen[N], log_text[N];            /* what was published on the device: outlives a crash */
byte last_gen[N];                        /* ever granted; only for I4 */

/* ---- schedulers ---- */
#define NEW 0
#define GRANTED 1
#define PLANNED 2         /* the plan is on its way */
#define RUNNING 3
#define COMPUTED 4        /* the result has arrived */
#define LEAVING 5         /* the plan that detaches it is on its way */
#define DETACHED 6
#define OVER 7
byte request[NR], block[NR], gen[NR];
byte owns, published;                    /* bit per request: writes its block; has published it */
bool alive[2], expired; byte attached[2];   /* the cache epoch that a scheduler is attached to */

/* ---- worker ---- */
#define COPIER 9
#define TORN 9
byte w_gen[N], w_seal[N], bytes[N], writer[N], readers[N];
byte users;                              /* bit per request: its sequence is attached */
byte step;                               /* 1 + the request whose step the device computes */
byte copies;                             /* under way, bit per order number */
byte copy_reads[N]; bool copy_writes[N]; /* what they do on the device and the host, whatever the books say */
#define USED(b) (copy_reads[b] || copy_writes[b] || (step && block[(step-1)%NR] == (b)))
#define UNKNOWN 0
#define COPIED 98
#define REFUSED 99
byte memory[NK];                         /* by order id: 1 + number while under way, then how it ended */
byte w_ce = 1, planning;                 /* highest cache epoch that registered it; the scheduler that plans here */
byte fenced, fenced_requests;            /* bit per scheduler; bit per request */
#define NOT_HERE 0
#define HERE 1            /* waits for the step */
#define HELD_UP 2         /* waits for copies */
byte fence[2], fence_copies[2];
byte fence_requests;                     /* what the window's fence says of requests; of schedulers: attached[] */
byte seen_gen[N], seen_seal[N];          /* the arrays in the window's acknowledgement */

#ifdef X_PIN
#define PINNED(b) false
#else
#define PINNED(b) pins[b]
#endif
#define EVICTABLE(b) (state[b] == CACHED && !held[b] && !draining[b] && !PINNED(b))
#define GRANTABLE(b) (state[b] == FREE || EVICTABLE(b))
#define FOUND(b, t) (state[b] == CACHED && tree[b] == (t))
#define ON_DEVICE(t) (FOUND(0,t) || (ND > 1 && FOUND(1%N,t)))
#define IN_HOST(t) (FOUND(ND,t) || (NH > 1 && FOUND((ND+1)%N,t)))

inline send_down(what, arg) { if :: connected -> assert(nfull(down)); down!what,arg :: else fi }
inline send_up(what, arg) { if :: connected -> assert(nfull(up)); up!what,arg :: else fi }

inline cut() {
  connected = false;
  do :: down?_,_ :: empty(down) -> break od;
  do :: up?_,_ :: empty(up) -> break od
}

/* ================= cache ================= */

inline set_free(b) {
  assert(phase != OPEN || !USED(b) || I9_free_while_used);
  state[b] = FREE; tree[b] = 0
}
inline let_go(b) {   /* free when nobody holds it any more */
  if :: (phase == OPEN && (state[b] == LEASED || state[b] == DRAINING)
         && !held[b] && !draining[b] && !written_for[b]) -> set_free(b)
     :: else fi
}
inline grant(b) {
  if :: state[b] == CACHED -> set_free(b) :: else fi;
  assert(!USED(b) || I9_granted_while_used);
  generation[b] = (generation[b] > ce*16 -> generation[b] : ce*16) + 1;
  assert(generation[b] > last_gen[b] || I4_generation_used_before); last_gen[b] = generation[b];
  state[b] = LEASED
}
inline publish_in(b, t) {
  assert(bytes[b] == t || I8_found_but_not_written);
  state[b] = CACHED; tree[b] = t
}
inline order(from, to) {
  k = (ce-1)*NO + next_id; next_id++;
  grant(to);
  src[k] = from; dst[k] = to; src_gen[k] = generation[from]; dst_gen[k] = generation[to]; text[k] = tree[from];
  jobs = jobs | BIT(k); pins[from]++; written_for[to] = true;
#ifdef X_WORD
  publish_in(to, text[k]);
#endif
  send_down(ORDER, ID(k)); k = 0
}
inline copies_done(id, done) {
  k = NUMBER(id);
  if
  :: jobs & BIT(k) ->
     jobs = jobs & ~BIT(k); pins[src[k]]--; written_for[dst[k]] = false;
     if
     :: done && !(ON_HOST(dst[k]) -> IN_HOST(text[k]) : ON_DEVICE(text[k])) ->
        publish_in(dst[k], text[k]);
        if :: !ON_HOST(dst[k]) -> log_gen[dst[k]] = generation[dst[k]]; log_text[dst[k]] = text[k] :: else fi
     :: else -> let_go(dst[k])
     fi
  :: else   /* of an earlier incarnation, or answered before */
  fi; k = 0
}
inline expire(r) {   /* one lease of scheduler 0 */
  if :: OWNERS(r) == 0 && (held[block[r]] & BIT(r)) ->
        b = block[r]; held[b] = held[b] & ~BIT(r); draining[b] = draining[b] | BIT(r);
        if :: state[b] == LEASED -> state[b] = DRAINING :: else fi; b = 0
     :: else fi
}
inline restart(b) { state[b] = FREE; generation[b] = 0; tree[b] = 0; held[b] = 0; draining[b] = 0; pins[b] = 0;
  written_for[b] = false }
inline load(b) {   /* what the worker reports; only the device's ledger can be in use by schedulers */
  generation[b] = w_gen[b];
#ifndef X_CLOSED
  if :: !ON_HOST(b) -> state[b] = DRAINING :: else fi
#endif
}
inline claim(r, s) {
  b = block[r];
  if
  :: OWNERS(r) != s || request[r] == NEW || request[r] == OVER
  :: else -> if
     :: (owns & BIT(r)) && gen[r] >= generation[b] ->
        generation[b] = gen[r]; held[b] = held[b] | BIT(r); state[b] = LEASED
     :: !(owns & BIT(r)) && gen[r] == generation[b] && w_seal[b] == TEXTS(r) ->
        held[b] = held[b] | BIT(r); state[b] = LEASED
     :: else -> fence_requests = fence_requests | BIT(r); request[r] = OVER
     fi
  fi; b = 0
}
inline open_block(b) {   /* the second look, and what the log tells; the host's trees start empty */
  if :: seen_gen[b] > generation[b] -> assert(!held[b]); generation[b] = seen_gen[b] :: else fi;
  if
  :: (!ON_HOST(b) && log_gen[b] && log_gen[b] == seen_gen[b] && generation[b] == seen_gen[b]
      && log_text[b] == seen_seal[b] && !ON_DEVICE(log_text[b])) -> publish_in(b, log_text[b])
  :: else -> if :: held[b] -> skip :: else -> set_free(b) fi
  fi;
  seen_gen[b] = 0; seen_seal[b] = 0
}
#define DRAINS (draining[0] || (ND > 1 && draining[1%N]))
inline say_again() {   /* same incarnation: nothing was lost but messages */
  if :: phase == CLOSING -> send_down(FENCE, WINDOW_FENCE) :: else fi;
  if :: expired && phase == OPEN && DRAINS -> send_down(FENCE, SESSION_FENCE) :: else fi;
#define SAY_AGAIN(number) if :: jobs & BIT(number) -> send_down(ORDER, ID(number)) :: else fi
  SAY_AGAIN(0); SAY_AGAIN(1);
#if NO > 1
  SAY_AGAIN(2); SAY_AGAIN(3);
#endif
  skip
}

#if N > 2
#define EACH_BLOCK(do_it) do_it(0); do_it(1); do_it(2)
#if N > 3
#undef EACH_BLOCK
#define EACH_BLOCK(do_it) do_it(0); do_it(1); do_it(2); do_it(3)
#endif
#else
#define EACH_BLOCK(do_it) do_it(0); do_it(1)
#endif
#if NR > 2
#define EACH_REQUEST(do_it) do_it(0); do_it(1); do_it(2)
#define EACH_REQUEST_OF(do_it, s) do_it(0,s); do_it(1,s); do_it(2,s)
#else
#define EACH_REQUEST(do_it) do_it(0); do_it(1)
#define EACH_REQUEST_OF(do_it, s) do_it(0,s); do_it(1,s)
#endif

active proctype Cache() {
  byte b, k, id;
end: do
  /* orders: any order that there is room for may be worth it */
#define DEMOTE(from, to) :: atomic { phase == OPEN && next_id < NO && state[from] == CACHED && !IN_HOST(tree[from]) \
       && GRANTABLE(to) -> order(from, to) }
#define PROMOTE(from, to) :: atomic { phase == OPEN && next_id < NO && state[from] == CACHED && !ON_DEVICE(tree[from]) \
       && GRANTABLE(to) -> order(from, to) }
#define EVICT(x) :: atomic { phase == OPEN && EVICTABLE(x) -> set_free(x) }
  DEMOTE(0, ND) PROMOTE(ND, 0) EVICT(0) EVICT(ND)
#if ND > 1
  DEMOTE(1, ND) PROMOTE(ND, 1) EVICT(1)
#endif
#if NH > 1
  DEMOTE(0, ND+1) PROMOTE(ND+1, 0) EVICT(ND+1)
#endif
#if ND > 1 && NH > 1
  DEMOTE(1, ND+1) PROMOTE(ND+1, 1)
#endif

  /* the worker's word */
  :: atomic { phase != DOWN && up?[DONE,id] -> up?DONE,id; copies_done(id, true); id = 0 }
  :: atomic { phase != DOWN && up?[FAILED,id] -> up?FAILED,id; copies_done(id, false); id = 0 }
  :: atomic { phase != DOWN && up?[ACK,SESSION_FENCE] -> up?ACK,SESSION_FENCE;
       if :: phase == OPEN ->
#define ACKNOWLEDGED(x) draining[x] = 0; let_go(x)
             EACH_BLOCK(ACKNOWLEDGED)
          :: else fi }
  :: atomic { phase != DOWN && up?[ACK,WINDOW_FENCE] -> up?ACK,WINDOW_FENCE;
       if :: phase == CLOSING -> phase = OPEN; fence_requests = 0; EACH_BLOCK(open_block)
          :: else fi }

  /* the dead scheduler's session expires */
  :: atomic { phase == OPEN && !alive[0] && !expired && attached[0] == ce ->
       expired = true; EACH_REQUEST(expire); send_down(FENCE, SESSION_FENCE) }

  /* crash and restart */
  :: atomic { phase != DOWN && crashes -> crashes--; phase = DOWN; jobs = 0; next_id = 0; fence_requests = 0;
       EACH_BLOCK(restart); cut() }
  :: atomic { phase == DOWN -> phase = STARTED; ce++ }
#ifdef X_CLOSED
  :: atomic { phase == WINDOW -> phase = OPEN; EACH_BLOCK(let_go) }
#else
  :: atomic { phase == WINDOW -> phase = CLOSING;   /* whoever is not back by now is over */
       if :: attached[0] != ce -> alive[0] = false; expired = true :: else fi;
       if :: attached[1] != ce -> alive[1] = false :: else fi;
       send_down(FENCE, WINDOW_FENCE) }
#endif
#define REATTACH(s) :: atomic { phase == WINDOW && alive[s] && attached[s] != ce -> \
       attached[s] = ce; EACH_REQUEST_OF(claim, s) }
  REATTACH(0) REATTACH(1)
  od
}

/* ================= the connection ================= */

active proctype Connection() {
  byte b;
end: do
  :: atomic { connected && cuts -> cuts--; cut() }
  /* the worker registers, and the cache takes the report at once */
  :: atomic { !connected && phase != DOWN ->
       connected = true;
       fence[0] = NOT_HERE; fence[1] = NOT_HERE; fence_copies[0] = 0; fence_copies[1] = 0;
       send_down(REGISTERED, ce);
       if :: phase == STARTED -> phase = WINDOW; EACH_BLOCK(load)
          :: else -> say_again()
       fi }
  od
}

/* ================= one request, on its scheduler's side ================= */

inline granted(b) { block[r] = b; gen[r] = generation[b]; request[r] = GRANTED }
proctype Request(byte r) {
end: do
#define MINE (alive[OWNERS(r)] && attached[OWNERS(r)] == ce && phase != DOWN)
#define SHARE(b) :: atomic { MINE && phase == OPEN && request[r] == NEW && FOUND(b, TEXTS(r)) -> \
       held[b] = held[b] | BIT(r); granted(b) }
#define OWN(b) :: atomic { MINE && phase == OPEN && request[r] == NEW && !ON_DEVICE(TEXTS(r)) && GRANTABLE(b) -> \
       grant(b); held[b] = BIT(r); owns = owns | BIT(r); granted(b) }
  SHARE(0) OWN(0)
#if ND > 1
  SHARE(1) OWN(1)
#endif
  :: atomic { alive[OWNERS(r)] && request[r] == GRANTED && planning == OWNERS(r) -> request[r] = PLANNED }
  :: atomic { MINE && phase == OPEN && request[r] == COMPUTED && (owns & BIT(r)) && !(published & BIT(r)) ->
       published = published | BIT(r);
       if :: state[block[r]] == LEASED && (held[block[r]] & BIT(r)) && !ON_DEVICE(TEXTS(r)) ->
             publish_in(block[r], TEXTS(r)); log_gen[block[r]] = gen[r]; log_text[block[r]] = TEXTS(r)
          :: else fi }
  :: atomic { alive[OWNERS(r)] && request[r] == COMPUTED -> request[r] = LEAVING }
  :: atomic { MINE && request[r] == DETACHED ->
       request[r] = OVER; held[block[r]] = held[block[r]] & ~BIT(r); let_go(block[r]) }
  od
}

/* ================= worker ================= */

inline take_seal(b, g, t) {
  if :: w_gen[b] == g && !w_seal[b] && writer[b] != COPIER ->
        w_seal[b] = t;
        if :: writer[b] -> writer[b] = 0; readers[b]++ :: else fi
     :: else fi
}
inline detach(r) {
  if :: users & BIT(r) ->
        users = users & ~BIT(r);
        if :: writer[block[r]] == r+1 -> writer[block[r]] = 0
           :: else -> assert(readers[block[r]] || W_users_do_not_follow); readers[block[r]]-- fi
     :: else fi
}
inline apply(r) {
  b = block[r];
  if
  :: planning != OWNERS(r) || (fenced & BIT(OWNERS(r))) || (fenced_requests & BIT(r)) -> request[r] = DETACHED
  :: else -> if
     :: owns & BIT(r) ->
        if
        :: gen[r] > w_gen[b] && !writer[b] && !readers[b] ->
           assert(!USED(b) || I7_written_while_used);
           w_gen[b] = gen[r]; w_seal[b] = 0; writer[b] = r+1; bytes[b] = TORN;
           users = users | BIT(r); step = r+1; request[r] = RUNNING
        :: else -> request[r] = DETACHED; assert(W_correct_order_refused)
        fi
     :: else ->
        take_seal(b, gen[r], TEXTS(r));
        if
        :: gen[r] == w_gen[b] && w_seal[b] == TEXTS(r) ->
           readers[b]++; users = users | BIT(r); step = r+1; request[r] = RUNNING
        :: else -> request[r] = DETACHED; assert(W_correct_order_refused)
        fi
     fi
  fi; b = 0
}
inline forget_users(b) {   /* a takeover: no sequence uses it any more, but copies do */
#ifdef X_HELD
  writer[b] = 0; readers[b] = 0
#else
  if :: !ON_HOST(b) -> writer[b] = (copy_writes[b] -> COPIER : 0); readers[b] = copy_reads[b] :: else fi
#endif
}
inline take_order(id) {
  k = NUMBER(id);
  if
#ifndef X_MEMORY
  :: memory[id] == COPIED -> send_up(DONE, id)
  :: memory[id] == REFUSED -> send_up(FAILED, id)
  :: memory[id] != COPIED && memory[id] != REFUSED && memory[id] != UNKNOWN -> skip   /* under way */
  :: memory[id] == UNKNOWN ->
#else
  :: true ->
#endif
     if :: !ON_HOST(src[k]) -> take_seal(src[k], src_gen[k], text[k]) :: else fi;
     if
     :: (w_gen[src[k]] == src_gen[k] && w_seal[src[k]] == text[k]
         && dst_gen[k] > w_gen[dst[k]] && !writer[dst[k]] && !readers[dst[k]]) ->
        assert(!USED(dst[k]) || I7_written_while_used);
        readers[src[k]]++;
        w_gen[dst[k]] = dst_gen[k]; w_seal[dst[k]] = 0; writer[dst[k]] = COPIER; bytes[dst[k]] = TORN;
        copies = copies | BIT(k); copy_reads[src[k]]++; copy_writes[dst[k]] = true; memory[id] = k+1;
#ifdef X_WHOLE
        send_up(DONE, id)
#endif
     :: else -> memory[id] = REFUSED; send_up(FAILED, id);
#ifndef X_MEMORY
        assert(W_correct_order_refused)
#endif
     fi
  fi; k = 0
}
inline copied(n) {
  assert(bytes[src[n]] == text[n] || I12_read_something_else);
  assert((readers[src[n]] && writer[dst[n]] == COPIER) || W_users_do_not_follow);
  bytes[dst[n]] = bytes[src[n]]; w_seal[dst[n]] = text[n];
  readers[src[n]]--; writer[dst[n]] = 0;
  copies = copies & ~BIT(n); copy_reads[src[n]]--; copy_writes[dst[n]] = false;
  if :: memory[ID(n)] == n+1 -> memory[ID(n)] = COPIED; send_up(DONE, ID(n)) :: else fi;
  fence_copies[0] = fence_copies[0] & ~BIT(n); fence_copies[1] = fence_copies[1] & ~BIT(n)
}
#define drop(r, s) if :: OWNERS(r) == s -> detach(r) :: else fi
#define drop_if_named(r) if :: fence_requests & BIT(r) -> detach(r) :: else fi
inline fence_scheduler(s) { fenced = fenced | BIT(s); EACH_REQUEST_OF(drop, s) }
inline take_fence(f) {
  if
  :: f == SESSION_FENCE -> fence_scheduler(0)
  :: else ->
     if :: attached[0] != ce -> fence_scheduler(0) :: else fi;
     if :: attached[1] && attached[1] != ce -> fence_scheduler(1) :: else fi;
     fenced_requests = fenced_requests | fence_requests; EACH_REQUEST(drop_if_named)
  fi;
  fence[f] = HELD_UP;
#ifndef X_FENCE
  fence_copies[f] = copies
#endif
}
#define see(b) seen_gen[b] = w_gen[b]; seen_seal[b] = w_seal[b]

active proctype Worker() {
  byte b, k, arg;
end: do
  /* plans, one step at a time */
#define PLAN(r) :: atomic { request[r] == PLANNED && !step -> apply(r) }
#define LEAVE(r) :: atomic { request[r] == LEAVING && !step && planning == OWNERS(r) -> \
       if :: published & BIT(r) -> take_seal(block[r], gen[r], TEXTS(r)) :: else fi; \
       detach(r); request[r] = DETACHED }
  PLAN(0) LEAVE(0) PLAN(1) LEAVE(1)
#if NR > 2
  PLAN(2) LEAVE(2)
#endif
  :: atomic { step -> b = block[step-1];
       if :: owns & BIT(step-1) -> bytes[b] = TEXTS(step-1)
          :: else -> assert(bytes[b] == TEXTS(step-1) || I12_read_something_else) fi;
       if :: planning == OWNERS(step-1) -> request[step-1] = COMPUTED :: else -> request[step-1] = OVER fi;
       step = 0; b = 0 }

  /* the cache's word */
  :: atomic { down?[REGISTERED,arg] -> down?REGISTERED,arg;
       if :: arg != w_ce -> w_ce = arg;
#ifndef X_FORGET
             memory[0] = UNKNOWN; memory[1] = UNKNOWN;
#if NO > 1
             memory[2] = UNKNOWN; memory[3] = UNKNOWN
#endif
#endif
          :: else fi; arg = 0 }
  :: atomic { down?[ORDER,arg] -> down?ORDER,arg; take_order(arg); arg = 0 }
  :: atomic { down?[FENCE,arg] -> down?FENCE,arg; fence[arg] = HERE; arg = 0 }
#define FENCED(f) \
  :: atomic { fence[f] == HERE && !step -> take_fence(f) } \
  :: atomic { fence[f] == HELD_UP && !fence_copies[f] -> fence[f] = NOT_HERE; send_up(ACK, f); \
       if :: f == WINDOW_FENCE -> EACH_BLOCK(see) :: else fi }
  FENCED(0) FENCED(1)

  /* a copy is over */
#define COPY(n) :: atomic { copies & BIT(n) -> copied(n) }
  COPY(0) COPY(1)
#if NO > 1
  COPY(2) COPY(3)
#endif
  od
}

/* ================= schedulers ================= */

active proctype Schedulers() {
#if TAKEOVERS
  byte b;
  atomic { alive[0] -> alive[0] = false }
  atomic { phase == OPEN -> alive[1] = true; attached[1] = ce }
  atomic { !(fenced & BIT(1)) -> planning = 1; users = 0; EACH_BLOCK(forget_users) }   /* beside a step, too */
#else
  skip
#endif
}
init { atomic { alive[0] = true; attached[0] = 1; run Request(0); run Request(1);
#if NR > 2
  run Request(2)
#endif
} }
