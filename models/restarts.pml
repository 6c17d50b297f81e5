/* Epochs through restarts of the cache: who may still use a block that a new incarnation holds to be free?

     cache        sessions, one worker's registration, the ledger; gone with a crash, and its number may be lost, too
     schedulers   P and Q: a lease of the one block, one step each time; they claim it again after a restart
     worker       its epoch, who plans here, which scheduler epochs are fenced

     Register (old epoch) -> all blocks drain, claims are judged -> fence of whoever is not back -> acknowledged, open

   A scheduler that is back is spared by the fence, so what it does not claim must not run any more. Two rules of
   epochs keep that true:
     X_RANDOM   counters of epochs begin at random, so incarnations of one number mint different ones: of schedulers,
                and X_RANDOM_WORKERS of workers
     X_REFUSED  a lease whose claim was refused is claimed again while something of it may run: the fence against it
                may have died with that incarnation
     X_BURY     who is back names the worker epochs that it was told are over; those never come back
   and two more that they stand on:
     X_ABOVE    who was attached to another incarnation of our number, or a later one, makes us start over above it
     X_WINDOW   the ledger opens after the fence was acknowledged, not at once
     X_UNUSED   also that of a worker where nobody plans and no block was ever written
     X_LATE     claims on a worker that was given up before it came are refused and noted: its fence names them
   -DX_<RULE> takes one away. */

#ifndef CRASHES
#define CRASHES 1         /* of the cache */
#endif
#ifndef LOSSES
#define LOSSES 0          /* restarts that begin at number 1 again */
#endif
#ifndef EXPIRIES
#define EXPIRIES 0        /* the cache declares a worker dead that is only slow */
#endif
#ifndef GIVEUPS
#define GIVEUPS 0         /* the cache stops to wait for a worker that has not come yet */
#endif
#ifndef RESTARTS
#define RESTARTS 0        /* of the worker: a new pool */
#endif
#ifndef SCHEDULERS
#define SCHEDULERS 2
#endif
#ifndef LEASES
#define LEASES 2          /* of each scheduler, at most 2 */
#endif

/* Never assigned: they name the assertion that fails. */
bool I4_generation_used_before, I9_free_while_used, I9_granted_while_used, I9_step_on_a_free_block,
     I9_step_on_a_block_of_another;

#define BIT(i) (1 << (i))
#define P 0
#define Q 1
#define NOBODY 9

/* ---- epochs of schedulers and workers: the number of the cache that minted them, then a counter; 1 .. 31 ---- */
#define EPOCH(first, count) ((number-1)*8 + (first) + (count) + 1)
#ifdef X_RANDOM
#define FIRST_SESSION 0
#else
#define FIRST_SESSION first
#endif
#ifdef X_RANDOM_WORKERS
#define FIRST_WORKER 0
#else
#define FIRST_WORKER first
#endif
#define MINTED_BY(e) (((e)-1)/8 + 1)
#define UP_TO_OLD ((BIT((number-1)*8) - 1) << 1)   /* bits of all epochs that lower numbers minted */
#define GENERATIONS 8     /* of one number */

/* ---- cache ---- */
#define DOWN 0
#define UP 1
byte cache = UP, number = 1, incarnation = 1;
byte first;                            /* where counters begin: 0, 2 or 4 */
byte taken[5] = { 0, 1, 0, 0, 0 };     /* by number: beginnings that its incarnations drew, bit per half */
byte crashes = CRASHES, losses = LOSSES, expiries = EXPIRIES;
#if GIVEUPS
byte giveups = GIVEUPS;
bool given_up;                         /* claims are not held for the worker any more */
#else
#define given_up false
#endif
byte sessions_minted, workers_minted;
int known, back;                       /* bit per scheduler epoch: it has a session; its Reattach has come */
int buried[2];                         /* worker epochs that a session named as over */
byte held_claims;                      /* bit per scheduler: its claim waits for the worker */
bool late;                             /* the fence went out: nobody re-attaches any more */
#define ABSENT 0
#define WINDOW 1
#define CLOSING 2
#define OPEN 3
byte worker = ABSENT, epoch, was_here; /* the registration; any epoch that the worker had in this incarnation */
#define FREE 0
#define LEASED 1
#define DRAINING 2
byte state, generation, holder = NOBODY, last_generation[32];
byte refused_leases;                   /* bit per lease, for the window's fence */

/* ---- schedulers ---- */
byte s_epoch[2], s_number[2];          /* its epoch, and the number of the cache that it was attached to last */
byte attached[2];                      /* incarnation */
bool fresh[2];                         /* its Reattach is to be sent */
bool has[2]; byte lease[2], gen[2], at[2];   /* the lease: its id, generation, worker epoch */
byte leases[2];                        /* how many it has had */
bool finished[2];                      /* the step's result came: nothing of this lease runs any more */
bool refused[2];                       /* its claim was: nothing new is planned with this lease */
int over[2];                           /* worker epochs that it was told are over */
byte told[2];                          /* on its way: this worker epoch is over */

/* ---- worker ---- */
byte w_epoch, w_generation, w_number, w_attached, restarts = RESTARTS;
byte planning = NOBODY, planning_epoch;   /* who plans here */
byte highest;                          /* scheduler epoch that ever did */
int fenced; byte fenced_leases;
byte step = NOBODY, step_lease;
bool plan[2]; byte p_lease[2], p_gen[2], p_at[2];    /* plans on their way */
byte registered, r_number;             /* on its way: Registered */
bool fence, ack; int spared; byte seen;

#define USED (step != NOBODY && w_epoch == epoch)
#define LEASE_BIT(s, l) BIT(2*(s) + (l))

inline set_free() { assert(!USED || worker != OPEN || I9_free_while_used); state = FREE; holder = NOBODY }
inline nobody_plans() { planning = NOBODY; planning_epoch = 0 }
inline give_up(s) { has[s] = false; refused[s] = false; finished[s] = false; gen[s] = 0; at[s] = 0; lease[s] = 0 }

/* ================= cache ================= */

inline forget() {
  cache = DOWN; known = 0; back = 0; held_claims = 0; late = false; worker = ABSENT; epoch = 0; was_here = false;
  state = DRAINING; generation = 0; holder = NOBODY; refused_leases = 0; sessions_minted = 0; workers_minted = 0;
  attached[P] = 0; attached[Q] = 0; fresh[P] = false; fresh[Q] = false; told[P] = 0; told[Q] = 0;
  buried[P] = 0; buried[Q] = 0; w_attached = 0; registered = 0; r_number = 0; fence = false;
  ack = false; spared = 0; seen = 0;
#if GIVEUPS
  given_up = false
#endif
}
inline start(n) {
  cache = UP; number = n; incarnation++;
#if LOSSES   /* where every number is used once, beginnings make no difference */
  if :: !(taken[number] & 1) -> first = 0
     :: taken[number] && !(taken[number] & 2) -> first = 2
     :: taken[number] && !(taken[number] & 4) -> first = 4
  fi;
  taken[number] = taken[number] | BIT(first/2)
#endif
}
inline end_worker() {
  if :: attached[P] == incarnation -> told[P] = epoch :: else fi;
  if :: attached[Q] == incarnation -> told[Q] = epoch :: else fi;
  worker = ABSENT; epoch = 0; holder = NOBODY; state = DRAINING; generation = 0; fence = false; ack = false;
  w_attached = 0; registered = 0
}
inline judge(s) {   /* rule 4, for an owned block */
  if
  :: (worker == WINDOW && at[s] == epoch && gen[s] >= generation && gen[s] <= (number-1)*GENERATIONS
      && !(refused_leases & LEASE_BIT(s, lease[s]))) ->
     if :: holder != NOBODY && holder != s && gen[s] > generation -> refuse(holder) :: else fi;
     if :: holder != NOBODY && holder != s && gen[s] == generation -> refuse(s)
        :: else -> generation = gen[s]; holder = s; state = LEASED
     fi
  :: else -> refuse(s)
  fi
}
inline hear(s) { if :: told[s] -> over[s] = over[s] | BIT(told[s]); told[s] = 0 :: else fi }
inline refuse(s) {   /* a worker's end was said before the verdict, and is heard first */
  hear(s); refused_leases = refused_leases | LEASE_BIT(s, lease[s]);
#ifdef X_REFUSED
  give_up(s);
#else
  if :: over[s] & BIT(at[s]) -> give_up(s) :: else -> refused[s] = true fi;
#endif
  if :: holder == s -> holder = NOBODY :: else fi
}
inline refuse_late(s) {   /* its worker was given up, and may come after all */
#ifdef X_LATE
  hear(s);
  if :: over[s] & BIT(at[s]) -> give_up(s) :: else -> refused[s] = true fi
#else
  refuse(s)
#endif
}
#define IS_OLD(e) ((e) && MINTED_BY(e) < number)
#define HAS_SESSION(s) (attached[s] == incarnation && (known & BIT(s_epoch[s])))
#define IS_BURIED ((HAS_SESSION(P) && (buried[P] & BIT(w_epoch))) || (HAS_SESSION(Q) && (buried[Q] & BIT(w_epoch))))

active proctype Cache() {
end: do
  :: atomic { cache == UP && crashes -> crashes--; forget() }
  :: atomic { cache == DOWN && number < 3 -> start(number+1) }
  :: atomic { cache == DOWN && losses -> losses--; start(1) }
  :: atomic { worker != ABSENT && expiries -> expiries--; end_worker() }
#if GIVEUPS
  :: atomic { cache == UP && worker == ABSENT && !was_here && giveups -> giveups--; given_up = true;
       if :: held_claims & BIT(P) -> refuse(P) :: else fi;
       if :: held_claims & BIT(Q) -> refuse(Q) :: else fi;
       held_claims = 0 }
#endif
  :: atomic { worker == WINDOW -> worker = CLOSING; late = true; known = known & back;
       fence = true; spared = known & UP_TO_OLD }
  :: atomic { worker == CLOSING && ack -> ack = false; refused_leases = 0;
       if :: seen > generation -> if :: holder != NOBODY -> refuse(holder) :: else fi; generation = seen :: else fi;
       seen = 0; worker = OPEN;
       if :: holder == NOBODY -> set_free() :: else fi }
  od
}

/* ================= the worker registers ================= */

active proctype Registration() {
end: do
  :: atomic { cache == UP && w_attached != incarnation ->
       if
#ifndef X_ABOVE
       :: w_number >= number && !was_here && number < 3 -> forget(); start(w_number+1)
       :: w_number < number || was_here ->
#else
       :: true ->
#endif
          w_attached = incarnation; r_number = number;
          if
#ifdef X_BURY
          :: w_epoch && !was_here ->
#else
          :: w_epoch && !was_here && !IS_BURIED ->
#endif
             registered = w_epoch; generation = w_generation;
#ifdef X_WINDOW
             worker = OPEN; set_free()
#else
             worker = WINDOW; state = DRAINING;
#ifdef X_UNUSED
             if :: !w_generation && planning == NOBODY -> worker = OPEN; set_free() :: else fi
#endif
#endif
          :: else ->
             registered = EPOCH(FIRST_WORKER, workers_minted); workers_minted++;
             generation = 0; worker = OPEN; state = FREE
          fi;
          epoch = registered; was_here = true;
          if :: held_claims & BIT(P) -> judge(P) :: else fi;
          if :: held_claims & BIT(Q) -> judge(Q) :: else fi;
          held_claims = 0
       fi }
  :: atomic { registered && (registered == w_epoch || step == NOBODY) ->   /* a new epoch waits for a quiet device */
       if :: r_number > w_number -> w_number = r_number :: else fi;
       if :: registered != w_epoch -> w_epoch = registered; w_generation = 0; nobody_plans(); fenced_leases = 0
          :: else fi;
       registered = 0; r_number = 0 }
  :: atomic { restarts -> restarts--; w_epoch = 0; w_generation = 0; w_number = 0; w_attached = 0; registered = 0;
       nobody_plans(); highest = 0; fenced = 0; fenced_leases = 0; step = NOBODY; plan[P] = false; plan[Q] = false;
       fence = false; ack = false;
       if :: worker != ABSENT -> end_worker() :: else fi }
  od
}

/* ================= a scheduler ================= */

proctype Scheduler(byte s) {
end: do
  /* its session with the cache */
  :: atomic { cache == UP && attached[s] != incarnation && sessions_minted < 2 ->
       if
#ifndef X_ABOVE
       :: s_number[s] >= number && number < 3 -> forget(); start(s_number[s]+1)
       :: s_number[s] < number ->
#else
       :: true ->
#endif
          attached[s] = incarnation; s_number[s] = number;
          if
          :: IS_OLD(s_epoch[s]) && (!late || (known & BIT(s_epoch[s]))) -> fresh[s] = true
          :: else ->   /* a new epoch: all that it had is lost */
             s_epoch[s] = EPOCH(FIRST_SESSION, sessions_minted); sessions_minted++;
             back = back | BIT(s_epoch[s]); over[s] = 0; give_up(s)
          fi;
          known = known | BIT(s_epoch[s])
       fi }
  :: atomic { fresh[s] && HAS_SESSION(s) -> fresh[s] = false; back = back | BIT(s_epoch[s]); buried[s] = over[s];
#ifndef X_BURY
       if :: worker != ABSENT && (over[s] & BIT(epoch)) && MINTED_BY(epoch) < number -> end_worker() :: else fi;
#endif
       if :: has[s] && worker == ABSENT && !was_here && !given_up -> held_claims = held_claims | BIT(s)
          :: has[s] && worker == ABSENT && !was_here && given_up -> refuse_late(s)
          :: has[s] && (worker != ABSENT || was_here) -> judge(s)
          :: else
       fi }
  :: atomic { fresh[s] && !HAS_SESSION(s) -> fresh[s] = false; attached[s] = 0 }   /* too late: the session is over */
  :: atomic { told[s] -> over[s] = over[s] | BIT(told[s]);
       if :: has[s] && at[s] == told[s] -> give_up(s) :: else fi;
       told[s] = 0 }

  /* a lease, one step with it, and back */
#define MINE (attached[s] == incarnation && cache == UP && !fresh[s] && (back & BIT(s_epoch[s])))
  :: atomic { MINE && worker == OPEN && state == FREE && !has[s] && !plan[s] && leases[s] < LEASES ->
       assert(!USED || I9_granted_while_used);
       generation = (generation > (number-1)*GENERATIONS -> generation : (number-1)*GENERATIONS) + 1;
       assert(generation > last_generation[epoch] || I4_generation_used_before); last_generation[epoch] = generation;
       state = LEASED; holder = s; has[s] = true; lease[s] = leases[s]; leases[s]++;
       gen[s] = generation; at[s] = epoch }
#define PLANS_HERE (planning == s && planning_epoch == s_epoch[s])
  :: atomic { (has[s] && !finished[s] && !refused[s] && !PLANS_HERE && at[s] == w_epoch && s_epoch[s] >= highest
               && !(fenced & BIT(s_epoch[s]))) ->
       planning = s; planning_epoch = s_epoch[s]; highest = s_epoch[s]; plan[s] = false }
  :: atomic { has[s] && !finished[s] && !refused[s] && PLANS_HERE && !plan[s] && step != s && !(over[s] & BIT(at[s])) ->
       plan[s] = true; p_lease[s] = lease[s]; p_gen[s] = gen[s]; p_at[s] = at[s] }
#define RUNS (plan[s] || (step == s && step_lease == lease[s]))   /* known by the results of plans, which keep order */
  :: atomic { MINE && has[s] && (finished[s] || refused[s]) && !RUNS && worker == OPEN ->
       if :: holder == s && at[s] == epoch -> set_free() :: else fi; give_up(s) }
  :: atomic { has[s] && refused[s] && !RUNS && holder != s -> give_up(s) }
  od
}

/* ================= worker ================= */

inline apply(s) {
  plan[s] = false;
  if
  :: (planning == s && p_at[s] == w_epoch && !(fenced & BIT(planning_epoch))
      && !(fenced_leases & LEASE_BIT(s, p_lease[s])) && p_gen[s] > w_generation) ->
     assert(worker != OPEN || epoch != w_epoch || state != FREE || I9_step_on_a_free_block);
     assert(worker != OPEN || epoch != w_epoch || state != LEASED || holder == s || I9_step_on_a_block_of_another);
     w_generation = p_gen[s]; step = s; step_lease = p_lease[s]
  :: else -> if :: has[s] && lease[s] == p_lease[s] -> finished[s] = true :: else fi
  fi;
  p_lease[s] = 0; p_gen[s] = 0; p_at[s] = 0
}
active proctype Worker() {
end: do
  :: atomic { plan[P] && step == NOBODY -> apply(P) }
  :: atomic { plan[Q] && step == NOBODY -> apply(Q) }
  :: atomic { step != NOBODY ->
       if :: has[step] && lease[step] == step_lease && planning == step -> finished[step] = true :: else fi;
       step = NOBODY; step_lease = 0 }
  :: atomic { fence && !registered && step == NOBODY -> fence = false;   /* the connection keeps its order */
       fenced = fenced | (UP_TO_OLD & ~spared); fenced_leases = fenced_leases | refused_leases;
       if :: planning != NOBODY && (fenced & BIT(planning_epoch)) -> nobody_plans() :: else fi;
       ack = true; seen = w_generation; spared = 0 }
  od
}
init { atomic { run Scheduler(P);
#if SCHEDULERS > 1
  run Scheduler(Q)
#endif
} }
