# Golden numbers for variance components of clients in groups, from R's lme4.
#   Rscript tests/golden/nested.R tests/golden/nested.json
# Each weight is one variable with its own mean; the variances are common to all weights of a unit. "no groups" and
# "no clients" have an estimate at the boundary, 0. Arrays are (group's clients, replicate, weight), by row.
suppressMessages({library(lme4); library(jsonlite)})
out <- commandArgs(trailingOnly = TRUE)[1]
RNGkind("Mersenne-Twister", "Inversion", "Rejection")

case <- function(name, seed, sizes, replicates, weights, sd_group, sd_client) {
  set.seed(seed)
  group <- rep(seq_along(sizes), sizes)
  w <- array(rnorm(length(group) * replicates * weights), c(length(group), replicates, weights))
  for (i in seq_len(weights)) {
    between <- rnorm(length(sizes), 0, sd_group)[group] + rnorm(length(group), 0, sd_client)
    w[, , i] <- w[, , i] + between + i
  }
  d <- expand.grid(client = seq_along(group), replicate = seq_len(replicates), weight = seq_len(weights))
  d$y <- as.vector(w)
  d$group <- factor(group[d$client])
  d$weight <- factor(d$weight)
  d$client <- factor(d$client)
  # Without its check for boundaries, bobyqa ends where the estimate is exact to 1e-8.
  control <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhobeg = .1, rhoend = 1e-11, maxfun = 1e5),
                         check.conv.singular = "ignore", calc.derivs = FALSE, boundary.tol = 0)
  model <- if (weights == 1) y ~ 1 + (1 | group/client) else y ~ 0 + weight + (1 | weight:group) + (1 | weight:client)
  fit <- lmer(model, d, REML = TRUE, control = control)
  v <- as.data.frame(VarCorr(fit))
  of <- function(...) v$vcov[v$grp %in% c(...)]
  list(name = name, group = group, shape = c(length(group), replicates, weights), weights = as.vector(aperm(w, 3:1)),
       groups = of("weight:group", "group"), clients = of("weight:client", "client:group"), noise = of("Residual"),
       log_likelihood = as.numeric(logLik(fit)))
}

write_json(list(
  versions = list(R = R.version.string, lme4 = as.character(packageVersion("lme4"))),
  tolerance = 1e-6,
  cases = list(
    case("balanced", 1, c(4, 4, 4, 4, 4), 2, 6, 1, 1),
    case("unlike groups", 2, c(2, 7, 3, 12), 2, 6, .8, 1.2),
    case("three replicates, groups of one client", 3, c(1, 5, 1, 8, 3, 2), 3, 5, 1, .7),
    case("one weight", 4, c(3, 5, 4, 6, 2), 2, 1, 2, 1),
    case("no groups", 5, c(3, 6, 4, 5), 2, 4, 0, 1),
    case("no clients", 6, c(3, 6, 4, 5, 2), 2, 4, 1, 0),
    case("neither", 14, c(3, 6, 4, 5), 2, 4, 0, 0)
  )
), out, digits = NA, auto_unbox = TRUE)
